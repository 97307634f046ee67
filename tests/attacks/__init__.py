"""Attacks that have had a CVE in some engine: twelve classes, several cases each. Each ends in an error or in nothing.

Whole suites for single classes are elsewhere: schema bombs (serving/test_structured.py), fuzzed files (weights/), slow
and vanishing clients (serving/test_faults.py), templates (text/test_template.py).
"""
