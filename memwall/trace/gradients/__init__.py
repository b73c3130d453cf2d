"""Watches what becomes of gradients in a recorded step, and whose hooks hear of them."""
