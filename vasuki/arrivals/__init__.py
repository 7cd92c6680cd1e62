"""Rows that arrive over time: gathered, packed, and how long they waited. Integers and times passed in: no clock here.

admission      rows held back until a batch of them is due
controller     how many rows are worth waiting for
packer         rows held back -> batches
percentiles    a waiting time over all rows
"""

from vasuki.arrivals.admission import ArrivalAdmission
from vasuki.arrivals.controller import Controller
from vasuki.arrivals.packer import pack_requests
from vasuki.arrivals.percentiles import Percentiles

__all__ = ["ArrivalAdmission", "Controller", "Percentiles", "pack_requests"]
