"""Programs on the simulated accelerator (`tests._sim`), and the faults that they must find."""
