"""Attacks that have had a CVE in some engine, class by class."""
