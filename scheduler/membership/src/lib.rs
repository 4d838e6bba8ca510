//! Keep a lease, watch the cluster.
