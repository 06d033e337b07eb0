"""`python -m asyncrl`."""

from asyncrl.cli import main

if __name__ == "__main__":
    main()
