"""What people type.

cli       the command line
check     `vasuki check`
starter   `vasuki init`
"""
