"""What a sharded model will do, before there are ranks: see ``plan``."""
