"""The error of a plan that cannot be made."""


class PlanError(Exception):
    """One line for people: what is wrong, where, and what to do."""
