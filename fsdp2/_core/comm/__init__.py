"""Communication between ranks: meshes, collectives, streams."""
