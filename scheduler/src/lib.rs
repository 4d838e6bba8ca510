//! Control plane: occupancy and the cluster view.
