"""Memory of the host beside a device: what is copied there, and comes back before it is used."""
