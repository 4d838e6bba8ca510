//! How a role tells the address it listens on to whoever started it.

use std::net::SocketAddr;

use tokio::sync::mpsc;

/// More listeners than any role has.
const PENDING_MAX: usize = 16;

/// The role's end: says what listens where; by default nobody is told.
#[derive(Clone, Debug, Default)]
pub struct Announce(Option<mpsc::Sender<(&'static str, SocketAddr)>>);

/// The starter's end of an [`Announce`].
#[derive(Debug)]
pub struct Announced(mpsc::Receiver<(&'static str, SocketAddr)>);

impl Announce {
    /// Makes both ends.
    #[must_use]
    pub fn channel() -> (Self, Announced) {
        let (sender, receiver) = mpsc::channel(PENDING_MAX);
        (Self(Some(sender)), Announced(receiver))
    }

    /// Tells that `what` (`"grpc"` or `"http"`) listens on `address` from now on.
    pub fn listening(&self, what: &'static str, address: SocketAddr) {
        tracing::info!(what, %address, "listening");
        if let Some(sender) = &self.0 {
            // A starter that has gone, or that never looks, needs no address.
            let _ = sender.try_send((what, address));
        }
    }
}

impl PartialEq for Announce {
    fn eq(&self, other: &Self) -> bool {
        match (&self.0, &other.0) {
            (None, None) => true,
            (Some(one), Some(two)) => one.same_channel(two),
            _ => false,
        }
    }
}

impl Announced {
    /// Waits for the next address; `None` when the role is gone and all were seen.
    pub async fn next(&mut self) -> Option<(&'static str, SocketAddr)> {
        self.0.recv().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn addresses_arrive_in_order_and_end_with_the_role() {
        let (announce, mut announced) = Announce::channel();
        let address = SocketAddr::from(([127, 0, 0, 1], 1));
        announce.listening("grpc", address);
        announce.listening("http", address);
        drop(announce);
        assert_eq!(announced.next().await, Some(("grpc", address)));
        assert_eq!(announced.next().await, Some(("http", address)));
        assert_eq!(announced.next().await, None);
    }

    #[test]
    fn nobody_listening_blocks_nobody() {
        let (announce, announced) = Announce::channel();
        for _ in 0..PENDING_MAX * 2 {
            announce.listening("grpc", SocketAddr::from(([127, 0, 0, 1], 1)));
        }
        drop(announced);
        announce.listening("grpc", SocketAddr::from(([127, 0, 0, 1], 1)));
        Announce::default().listening("grpc", SocketAddr::from(([127, 0, 0, 1], 1)));
    }
}
