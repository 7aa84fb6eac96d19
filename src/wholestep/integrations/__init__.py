"""Training with other people's loops: one module for each framework, which imports it only when it is asked for.

Nothing else in the package knows this room, so that none of the frameworks is needed to compile a step of one's own.
"""
