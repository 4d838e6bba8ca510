//! Harness, cluster tests, fixtures.
