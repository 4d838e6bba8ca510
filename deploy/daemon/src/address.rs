//! Addresses as configurations give them, judged by their form alone: nothing is opened and no name is looked up.

use std::net::{IpAddr, Ipv6Addr};

/// Text that is no address for its purpose.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{option} {address:?} {reason}; give HOST:PORT, such as {example}")]
pub struct InvalidAddress {
    option: &'static str,
    address: String,
    reason: &'static str,
    example: &'static str,
}

/// Checks that `address` names a host and a port to listen on, 0 for any free one; errors name `option` as the place to
/// change it.
///
/// # Errors
/// Says what is wrong with it.
pub fn check_listen(option: &'static str, address: &str) -> Result<(), InvalidAddress> {
    let wrong = |reason| InvalidAddress { option, address: address.to_owned(), reason, example: "127.0.0.1:0" };
    part(address).map(drop).map_err(wrong)
}

/// Checks that `address` names a host and a port that others can connect to.
///
/// # Errors
/// As [`check_listen`], and when it means no machine or no port in particular.
pub fn check_reachable(option: &'static str, address: &str) -> Result<(), InvalidAddress> {
    let wrong = |reason| InvalidAddress { option, address: address.to_owned(), reason, example: "10.0.0.7:7000" };
    let (host, port) = part(address).map_err(wrong)?;
    if host.parse::<IpAddr>().is_ok_and(|ip| ip.is_unspecified()) {
        return Err(wrong("is every address of a machine, which nobody can connect to"));
    }
    if port == 0 { Err(wrong("has port 0, which nobody can connect to")) } else { Ok(()) }
}

/// Checks what others are told to connect to, or nothing, for the address that is listened on.
///
/// # Errors
/// As [`check_reachable`].
pub fn check_advertise(option: &'static str, address: &str) -> Result<(), InvalidAddress> {
    if address.is_empty() { Ok(()) } else { check_reachable(option, address) }
}

/// Checks addresses of others that are connected to, each HOST:PORT or `http://HOST:PORT`.
///
/// # Errors
/// As [`check_reachable`], for the first.
pub fn check_peers(option: &'static str, addresses: &[String]) -> Result<(), InvalidAddress> {
    let check = |address: &String| check_reachable(option, address.strip_prefix("http://").unwrap_or(address));
    addresses.iter().try_for_each(check)
}

/// Host, without brackets, and port.
fn part(address: &str) -> Result<(&str, u16), &'static str> {
    let (host, port) = address.rsplit_once(':').ok_or("has no port")?;
    let port = port.bytes().all(|byte| byte.is_ascii_digit()).then(|| port.parse().ok()).flatten();
    let port = port.ok_or("has no port from 0 to 65535")?;
    if let Some(ip) = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
        return ip.parse::<Ipv6Addr>().map(|_| (ip, port)).map_err(|_| "has no IPv6 address in its brackets");
    }
    let of_name = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_');
    match host {
        "" => Err("has no host"),
        _ if host.contains(':') && host.parse::<Ipv6Addr>().is_ok() => Err("has an IPv6 address without brackets"),
        _ if host.bytes().all(of_name) => Ok((host, port)),
        _ => Err("has a host that is neither a name nor an IP address"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_and_ports_are_told_from_what_is_none() {
        for good in ["127.0.0.1:0", "[::]:7000", "0.0.0.0:65535", "worker-3.tessera_sys.svc:80"] {
            check_listen("x", good).unwrap();
        }
        for bad in ["", "host", "host:", ":80", "host:65536", "host:-1", "host:+1", "a b:1", " a:1", "a:1 ", "[::1:80"]
        {
            let error = check_listen("worker.listen", bad).unwrap_err().to_string();
            assert!(
                error.starts_with(&format!("worker.listen {bad:?} has ")) && error.contains("HOST:PORT"),
                "{error}"
            );
        }
        for bad in ["::1:80", "http://host:80", "[1.2.3.4]:80", "host/path:80"] {
            assert!(check_listen("x", bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn what_nobody_can_connect_to_is_no_address_for_others() {
        for good in ["10.0.0.7:7000", "[fd00::7]:7000", "router-0:1"] {
            check_reachable("x", good).unwrap();
        }
        check_advertise("x", "").unwrap();
        check_peers("x", &["http://10.0.0.7:7000".to_owned(), "router-0:1".to_owned()]).unwrap();
        assert!(check_peers("x", &["a:1".to_owned(), "https://10.0.0.7:7000".to_owned()]).is_err());
        for bad in ["0.0.0.0:7000", "[::]:7000", "10.0.0.7:0", "garbage"] {
            let error = check_reachable("worker.advertise", bad).unwrap_err().to_string();
            assert!(error.contains(bad) && error.contains("worker.advertise"), "{error}");
        }
    }
}
