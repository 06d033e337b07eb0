"""Records and Protocols that rooms share. Rooms never import each other: they meet here. Knows no torch."""
