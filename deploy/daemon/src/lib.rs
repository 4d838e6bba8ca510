//! How each process is configured, observed, secured and stopped.
