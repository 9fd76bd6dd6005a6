"""What ranks exchange: meshes, collectives, streams, and how ranks agree."""
