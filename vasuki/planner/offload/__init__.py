"""What moves to host memory.

choice        mode and reason, by price
algorithms    how many layers can live on the host without slowing a step down (Vasuki, Algorithms 1 and 2)
"""
