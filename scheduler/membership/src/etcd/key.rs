//! The keys under which etcd keeps members.

use contract::ids::Incarnation;
use contract::view::{MemberKey, MemberKind};

/// The key of a member.
pub(super) fn of(prefix: &str, key: &MemberKey) -> String {
    format!("{prefix}/{}/{}/{}", kind_name(key.kind), key.id, key.incarnation)
}

/// Reads a key back; `None` when it is no member's.
pub(super) fn parse(prefix: &str, key: &[u8]) -> Option<MemberKey> {
    let rest = std::str::from_utf8(key).ok()?.strip_prefix(prefix)?.strip_prefix('/')?;
    let mut parts = rest.split('/');
    let (kind, id, incarnation) = (parts.next()?, parts.next()?, parts.next()?);
    if parts.next().is_some() || id.is_empty() || incarnation.len() != 16 {
        return None;
    }
    let kind = [MemberKind::Worker, MemberKind::Router, MemberKind::Scheduler]
        .into_iter()
        .find(|known| kind_name(*known) == kind)?;
    let incarnation = Incarnation(u64::from_str_radix(incarnation, 16).ok()?);
    Some(MemberKey { kind, id: id.to_owned(), incarnation })
}

fn kind_name(kind: MemberKind) -> &'static str {
    match kind {
        MemberKind::Worker => "worker",
        MemberKind::Router => "router",
        MemberKind::Scheduler => "scheduler",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_read_back_and_strangers_do_not() {
        let key = MemberKey { kind: MemberKind::Router, id: "r-0".to_owned(), incarnation: Incarnation(0xab) };
        let text = of("/tessera/v1/members", &key);
        assert_eq!(text, "/tessera/v1/members/router/r-0/00000000000000ab");
        assert_eq!(parse("/tessera/v1/members", text.as_bytes()), Some(key));
        for stranger in [
            "/tessera/v1/members/router/r-0",
            "/tessera/v1/members/printer/r-0/00000000000000ab",
            "/tessera/v1/members/router/r-0/ab",
            "/tessera/v1/members/router/r-0/00000000000000ab/x",
            "/tessera/v1/membersrouter/r-0/00000000000000ab",
            "/other",
        ] {
            assert_eq!(parse("/tessera/v1/members", stranger.as_bytes()), None, "{stranger}");
        }
        assert_eq!(parse("/tessera", &[0xff, 0xfe]), None);
    }
}
