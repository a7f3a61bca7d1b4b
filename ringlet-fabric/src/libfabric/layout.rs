//! Our structs and constants against those of the headers, which a C program tells.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::process::{Command, Stdio};

use super::abi::{CONSTANTS, FIELDS, STRUCTS};

/// The headers call `type` what is `kind` here.
fn in_c(field: &str) -> &str {
    if field == "kind" { "type" } else { field }
}

/// Whole structs are as long as in C; of a table, and of an endpoint, only the beginning is ours.
fn is_whole(name: &str) -> bool {
    !name.starts_with("fi_ops") && name != "fid_ep"
}

#[test]
fn layouts_are_those_of_the_headers() {
    let headers = "#include <rdma/fabric.h>\n#include <rdma/fi_domain.h>\n#include <rdma/fi_endpoint.h>\n\
                   #include <rdma/fi_rma.h>\n#include <rdma/fi_cm.h>\n#include <rdma/fi_eq.h>\n";
    let mut source = format!("#include <stdio.h>\n{headers}int main(void) {{\n");
    let mut ours = BTreeMap::new();
    let mut tell = |what: String, value: String, is: u64| {
        writeln!(source, "printf(\"%s=%llu\\n\", \"{what}\", (unsigned long long)({value}));")
            .unwrap();
        ours.insert(what, is);
    };
    for &(name, field, offset, size) in FIELDS {
        let field = in_c(field);
        let offset_in_c = format!("offsetof(struct {name}, {field})");
        tell(format!("{name}.{field} at"), offset_in_c, offset as u64);
        let size_in_c = format!("sizeof ((struct {name} *)0)->{field}");
        tell(format!("{name}.{field} bytes"), size_in_c, size as u64);
    }
    for &(name, size) in STRUCTS.iter().filter(|(name, _)| is_whole(name)) {
        tell(format!("{name} bytes"), format!("sizeof(struct {name})"), size as u64);
    }
    for &(name, value) in CONSTANTS {
        // (A signed one is extended, in C as here.)
        tell(name.into(), name.into(), value);
    }
    source += "return 0; }\n";

    let folder = std::env::temp_dir().join(format!("ringlet-layout-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let (file, program) = (folder.join("layout.c"), folder.join("layout"));
    fs::write(&file, format!("{headers}int main(void) {{ return 0; }}\n")).unwrap();
    let compile =
        || Command::new("cc").arg("-o").arg(&program).arg(&file).stderr(Stdio::piped()).output();
    let skipped = match compile() {
        Err(error) => Some(format!("no C compiler (cc): {error}")),
        Ok(done) if !done.status.success() => {
            Some("no headers of libfabric (libfabric-dev)".into())
        }
        Ok(_) => None,
    };
    if let Some(why) = skipped {
        eprintln!("skipped: {why}");
        fs::remove_dir_all(&folder).unwrap();
        return;
    }
    fs::write(&file, source).unwrap();
    let compiled = compile().unwrap();
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    let told = Command::new(&program).output().unwrap();
    fs::remove_dir_all(&folder).unwrap();
    let told = String::from_utf8(told.stdout).unwrap();
    let theirs: BTreeMap<_, _> = told
        .lines()
        .map(|line| line.split_once('=').unwrap())
        .map(|(what, value)| (what.to_string(), value.parse::<u64>().unwrap()))
        .collect();
    assert_eq!(ours, theirs);
}
