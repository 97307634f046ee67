"""A drafter from your own traffic: record, train, measure, deploy, watch."""
