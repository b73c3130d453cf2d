"""The script that `memwall demo` trains; in a folder of its own, which is first on the script's import path."""
