"""What ranks exchange: meshes, collectives, streams."""
