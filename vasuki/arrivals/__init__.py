"""Rows that arrive over time: gathered, packed, and how long they waited. Integers and times passed in: no clock here.

source         rows as the engine gets them
rounds         whose turn it is: first come, first served, or in rounds, the short prompts first
admission      rows held back until a batch of them is due
gathering      what decides how they are
controller     how many rows are worth waiting for
packer         rows held back -> batches
waiting_times  how long rows wait for their first token, and for their last
percentiles    a waiting time over all rows
"""

from vasuki.arrivals.admission import ArrivalAdmission
from vasuki.arrivals.controller import Controller
from vasuki.arrivals.gathering import Gathering
from vasuki.arrivals.packer import pack_requests
from vasuki.arrivals.percentiles import Percentiles
from vasuki.arrivals.rounds import FirstCome, Rounds
from vasuki.arrivals.source import ArrivingRows, Feed, admission_for
from vasuki.arrivals.waiting_times import WaitingTimes

__all__ = [
    "ArrivalAdmission",
    "ArrivingRows",
    "Controller",
    "Feed",
    "FirstCome",
    "Gathering",
    "Percentiles",
    "Rounds",
    "WaitingTimes",
    "admission_for",
    "pack_requests",
]
