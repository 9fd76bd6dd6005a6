"""HTML pages of plans and recordings: their contents, and one file that shows them."""
