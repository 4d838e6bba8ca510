//! Wire types of Tessera, their conversions and status codes.
