"""Conversion of shards to full tensors and back, between steps and in bounded memory."""
