//! Against a real etcd.
