//! What Tessera's processes promise each other, as plain validated types: no IO, no clock, no internal dependency.

pub mod cost;
pub mod demand;
pub mod error;
pub mod hash;
pub mod ids;
pub mod kv;
pub mod ledger;
pub mod model;
pub mod occupancy;
pub mod placements;
pub mod plan;
pub mod request;
pub mod stream;
pub mod view;
