"""Everything that touches libp2p, behind one thin interface (interface.py), so that the rest runs on a simulated network."""
