"""Predicts a sharded model's memory, communication and time, on simulated ranks: see ``plan``."""
