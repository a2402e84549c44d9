"""Data files that come with the package: the demo model's calibration and evaluation text."""
