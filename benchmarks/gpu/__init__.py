"""Questions to one GPU: a driver with limits, and a file for each stage (``scripts/gpu``)."""
