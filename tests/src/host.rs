//! Where a process of a test runs: on the loopback interface, or in a network namespace of its own.

use std::ffi::OsStr;
use std::net::Ipv4Addr;
use std::process::Command;

/// A place with an address.
#[derive(Clone, Debug)]
pub struct Host {
    pub address: Ipv4Addr,
    /// The namespace's name, if it is not the test's own.
    pub namespace: Option<String>,
}

impl Host {
    /// The loopback interface of the test's own namespace.
    pub const LOOPBACK: Self = Self { address: Ipv4Addr::LOCALHOST, namespace: None };

    /// Where to listen so that the system chooses the port.
    pub fn any_port(&self) -> String {
        format!("{}:0", self.address)
    }

    /// A command that runs `program` here, as the child itself.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let Some(namespace) = &self.namespace else { return Command::new(program) };
        let mut command = Command::new("ip");
        command.args(["netns", "exec", namespace]).arg(program);
        command
    }
}
