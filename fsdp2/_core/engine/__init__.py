"""When things happen: units, the runtime above them, the hooks on modules."""
