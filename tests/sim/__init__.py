"""Programs on the simulated accelerator (`tests.kit.sim`), and the faults that they must find."""
