"""Prediction of a sharded model's memory, communication and time, without ranks: see ``plan``."""
