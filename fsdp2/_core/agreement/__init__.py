"""How ranks find out, without a wait, that they do the same things in the same order."""
