"""`swarmctl service`: the daemon as a service of the user's, that starts with the machine and needs nobody.

units     the unit file of systemd and the property list of launchd, as text
managers  what installs, asks and removes them
"""
