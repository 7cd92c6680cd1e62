"""Which vasuki this is. Packages are built with it, and a checkout that nobody has installed has no other."""

VERSION = "0.1.0"
