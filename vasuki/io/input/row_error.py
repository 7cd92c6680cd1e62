"""Trouble with one row: it becomes a failed row of the output, never an end of the job."""

from __future__ import annotations


class RowError(Exception):
    """Why a row cannot be run, in the words of its `error` column."""
