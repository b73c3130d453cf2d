"""C loops over rows and swaps of their pages."""
