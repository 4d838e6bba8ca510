//! Wire types of Tessera, their conversions to contract types, and status codes.
//!
//! `generated/` is made from the `.proto` files by `cargo xtask codegen` and committed.

pub mod convert;
mod convert_cluster;
mod convert_ledger;
pub mod exchange;
pub mod status;

pub use convert::WireError;

/// File descriptors of all packages, for reflection.
pub const DESCRIPTOR_SET: &[u8] = include_bytes!("generated/descriptors.bin");

macro_rules! package {
    ($name:ident, $file:literal, $doc:literal) => {
        #[doc = $doc]
        pub mod $name {
            #[doc = $doc]
            pub mod v1 {
                #![allow(warnings, clippy::all, clippy::pedantic, clippy::restriction, reason = "generated code")]
                include!(concat!("generated/", $file));
            }
        }
    };
}

package!(inference, "tessera.inference.v1.rs", "What clients speak to a router.");
package!(worker, "tessera.worker.v1.rs", "What routers speak to workers.");
package!(cluster, "tessera.cluster.v1.rs", "What workers and routers speak to the scheduler.");
