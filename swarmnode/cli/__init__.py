"""The two commands: `swarmnode` (the daemon) and `swarmctl` (everything else)."""
