"""The order in which rows start.

planned_order    a window of rows, in the order that packs memory and keeps the tail short
output_length    output lengths, learned while rows end
"""

from vasuki.planner.ordering.planned_order import PlannedOrder, order_requests

__all__ = ["PlannedOrder", "order_requests"]
