"""Find the stored row of each cell, and put rows into the messages of answers."""
