"""The user-facing API of a model: sharding, settings, inspection."""
