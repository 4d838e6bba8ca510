//! Whose a request is, and what is told about it.

use daemon::config::Document;

use super::*;

fn settings(text: &str) -> AdmissionSettings {
    let document = Document::parse(text, "test").unwrap();
    let section = document.section::<AdmissionSettings>("admission").unwrap();
    assert!(section.unknown.is_empty(), "{:?}", section.unknown);
    section.value
}

const TABLE: &str = r#"
[admission]
tenant_header = "x-tenant"
[admission.default]
n_concurrent_max = 100
[admission.tenants.acme]
weight = 3
requests_per_minute = 600
[admission.tenants.umbrella]
[admission.keys]
"sk-1" = "acme"
"sk-2" = "acme"
"sk-3" = "umbrella"
"#;

#[test]
fn keys_name_tenants_before_headers_and_all_others_share_one() {
    let table = TenantTable::new(&settings(TABLE)).unwrap();
    let name = |key, header| table.find(key, header).name.to_string();
    assert_eq!(name(Some("sk-2"), None), "acme");
    assert_eq!(name(Some("sk-3"), Some("acme")), "umbrella");
    assert_eq!(name(Some("sk-9"), Some("acme")), "acme");
    assert_eq!(name(None, Some("acme")), "acme");
    for (key, header) in [(None, None), (Some("sk-9"), None), (None, Some("nobody")), (Some(""), Some(""))] {
        assert_eq!(name(key, header), "default");
    }
    assert_eq!(table.find(Some("sk-1"), None).limits.weight, 3);
    assert_eq!(table.find(None, None).limits.n_concurrent_max.map(u64::from), Some(100));
}

#[test]
fn ten_thousand_names_are_one_tenant_and_one_label() {
    let table = TenantTable::new(&settings(TABLE)).unwrap();
    let names = (0..10_000).map(|n| format!("tenant-{n}"));
    let mut labels: Vec<String> = names.map(|name| table.find(Some(&name), Some(&name)).label().to_owned()).collect();
    labels.push(table.find(None, Some("acme")).label().to_owned());
    labels.sort();
    labels.dedup();
    assert_eq!(labels, ["acme", "other"]);
    assert_eq!(table.iter().count(), 3);
}

#[test]
fn a_table_that_does_not_tell_tenants_apart_is_refused() {
    let error = |text: &str| TenantTable::new(&settings(text)).unwrap_err().to_string();
    assert!(error("[admission.keys]\nsk-1 = 'nobody'").contains("\"nobody\""));
    assert!(error("[admission.tenants.a]\n[admission.keys]\n'' = 'a'").contains("\"a\""));
    assert!(error("[admission.tenants.other]").contains("other"));
    assert!(error("[admission.tenants.default]").contains("router.admission.default"));
}

#[test]
fn keys_are_never_shown() {
    let text = format!("{:?} {:?}", settings(TABLE), TenantTable::new(&settings(TABLE)).unwrap());
    assert!(text.contains("acme") && !text.contains("sk-"), "{text}");
}

#[test]
fn what_would_come_too_late_is_told_when_to_come_back() {
    let outlook = Outlook { tokens_ahead: 10_000, tokens_per_ms: 10.0, first_token_ms: 500.0 };
    let late = |outlook: Outlook, goal_ms, left_ms| outlook.judge(goal_ms, left_ms).err();
    assert_eq!(late(outlook, 1_500, None), None);
    let told = |allowed_ms, retry_after_ms| Some(Late { expected_ms: 1_500, allowed_ms, retry_after_ms });
    assert_eq!(late(outlook, 1_200, None), told(1_200, 300));
    assert_eq!(late(outlook, 1_200, Some(1_000)), told(1_000, 500));
    assert_eq!(late(outlook, 9_000, Some(100)), told(100, 1_000), "an empty queue is the most there is to wait for");
    assert_eq!(late(Outlook { tokens_ahead: 0, ..outlook }, 100, None), None, "it takes longer by itself");
    assert_eq!(late(outlook, 100, None), told(600, 900));
    for tokens_per_ms in [0.0, f64::NAN, -1.0] {
        assert_eq!(late(Outlook { tokens_per_ms, ..outlook }, 1, None), None, "nothing is known");
    }
    let error: contract::error::RequestError = outlook.judge(1_200, None).unwrap_err().into();
    assert!(error.to_string().contains("retry after 300 ms"), "{error}");
}
