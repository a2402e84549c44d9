"""`python -m swarmnode` is the command `swarmnode`."""

from swarmnode.cli.daemon import main

if __name__ == "__main__":
    main()
