"""Pages to look at: what a plan or a recording shows, and one HTML file that shows it."""
