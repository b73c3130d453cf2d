"""The techniques that a plan's actions name, one file each: its handler, and the check that it has an effect.

`memwall.apply.technique` finds the files here by itself.
"""
