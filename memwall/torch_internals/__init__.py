"""torch's insides behind one door: every name that torch does not promise to keep is used here and nowhere else.

Each module has one subject. A name is looked up once, when its module is imported, so that what is called per operation
is torch's own function. A release that lacks it changes nothing at import: who calls it gets `NotAvailableError`, or
what the docstring says.
"""
