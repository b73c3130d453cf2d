"""Holds the script that `memwall demo` trains: this folder is first on the script's import path."""
