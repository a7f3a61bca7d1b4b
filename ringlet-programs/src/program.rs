//! Can a preloaded library reach a program? Answered from its file, before it runs.

use std::fs::{File, Metadata};
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::{ffi::OsStr, io};

use object::elf::{self, FileHeader32, FileHeader64};
use object::read::ReadCache;
use object::read::elf::{FileHeader, ProgramHeader};
use object::{Endianness, FileKind};
use rustix::fs::{Access, OFlags, StatVfsMountFlags};

use crate::table::printable;

/// The kernel follows at most this many scripts that are interpreters of scripts.
const SCRIPT_DEPTH_MAX: usize = 5;
/// How much of a script's first line the kernel reads.
const SCRIPT_LINE_MAX_BYTES: u64 = 256;

/// What preloading does to a program.
#[derive(Debug, PartialEq, Eq)]
pub enum Reach {
    Reached,
    /// It is not reached itself, but what it starts may be, so the environment is still worth setting.
    ChildrenOnly(String),
    /// It is not reached, and to preload a library into it would do harm or nothing.
    Unreached(String),
}

/// Why a program cannot be run, in the terms of env(1)'s exit status.
#[derive(Debug, PartialEq, Eq)]
pub enum NotFound {
    /// 127
    Missing,
    /// 126
    NotExecutable,
}

/// Finds a program as execvp(3) does.
pub fn find(name: &OsStr, path: Option<&OsStr>) -> Result<PathBuf, NotFound> {
    if name.is_empty() {
        return Err(NotFound::Missing);
    }
    if name.as_bytes().contains(&b'/') {
        return executable(PathBuf::from(name));
    }
    let path = path.unwrap_or(OsStr::new("/bin:/usr/bin"));
    let mut result = Err(NotFound::Missing);
    for directory in std::env::split_paths(path) {
        // An empty entry is the current directory; the dot keeps the result from being looked up in PATH again.
        let directory = if directory.as_os_str().is_empty() { ".".into() } else { directory };
        match executable(directory.join(name)) {
            Ok(found) => return Ok(found),
            Err(NotFound::NotExecutable) => result = Err(NotFound::NotExecutable),
            Err(NotFound::Missing) => {}
        }
    }
    result
}

fn executable(path: PathBuf) -> Result<PathBuf, NotFound> {
    match path.metadata() {
        Ok(metadata) if metadata.is_dir() => Err(NotFound::NotExecutable),
        Ok(_) if rustix::fs::access(&path, Access::EXEC_OK).is_ok() => Ok(path),
        Err(error) if error.kind() != io::ErrorKind::PermissionDenied => Err(NotFound::Missing),
        _ => Err(NotFound::NotExecutable),
    }
}

/// Judges the program at `path`, started with `arguments`. A file that cannot be read or understood is taken to be
/// reachable: the kernel decides, and preloading into what is no program harms nobody.
pub fn inspect(path: &Path, arguments: &[&OsStr]) -> Reach {
    inspect_to_depth(path, arguments, SCRIPT_DEPTH_MAX)
}

/// A file; what is none, such as a FIFO, might keep us waiting and is not for the kernel to run.
fn open(path: &Path) -> Option<File> {
    let flags = (OFlags::NONBLOCK | OFlags::NOCTTY).bits() as i32;
    let file = File::options().read(true).custom_flags(flags).open(path).ok()?;
    file.metadata().is_ok_and(|metadata| metadata.is_file()).then_some(file)
}

fn inspect_to_depth(path: &Path, arguments: &[&OsStr], depth: usize) -> Reach {
    let Some(mut file) = open(path) else { return Reach::Reached };
    let mut start = Vec::new();
    if (&mut file).take(SCRIPT_LINE_MAX_BYTES).read_to_end(&mut start).is_err() {
        return Reach::Reached;
    }
    if let Some(line) = start.strip_prefix(b"#!") {
        let line = line.split(|byte| *byte == b'\n').next().unwrap_or_default().trim_ascii();
        let end = line.iter().position(u8::is_ascii_whitespace).unwrap_or(line.len());
        let (interpreter, rest) = line.split_at(end);
        let words = rest.split(u8::is_ascii_whitespace).filter(|word| !word.is_empty());
        let words: Vec<&OsStr> = words.map(OsStr::from_bytes).collect();
        return match depth {
            0 => Reach::Reached,
            _ => inspect_to_depth(Path::new(OsStr::from_bytes(interpreter)), &words, depth - 1),
        };
    }
    let Ok(metadata) = file.metadata() else { return Reach::Reached };
    let reach = match inspect_elf(file) {
        Ok(Reach::Reached) => inspect_privileges(path, &metadata),
        Ok(reach) => reach,
        Err(_) => Reach::Reached,
    };
    // env is only a way to find another program.
    if reach == Reach::Reached
        && path.file_name() == Some(OsStr::new("env"))
        && let Some((program, arguments)) = program_of_env(arguments)
        && let Ok(path) = find(program, std::env::var_os("PATH").as_deref())
        && depth > 0
    {
        return inspect_to_depth(&path, arguments, depth - 1);
    }
    reach
}

/// The program in `env [-S] [-i] [NAME=VALUE]... PROGRAM ARGUMENTS`.
fn program_of_env<'a>(arguments: &'a [&'a OsStr]) -> Option<(&'a OsStr, &'a [&'a OsStr])> {
    let at = arguments
        .iter()
        .position(|word| !word.as_bytes().starts_with(b"-") && !word.as_bytes().contains(&b'='))?;
    Some((arguments[at], &arguments[at + 1..]))
}

pub fn is_elf(path: &Path) -> bool {
    let mut magic = [0; elf::ELFMAG.len()];
    open(path).is_some_and(|mut file| file.read_exact(&mut magic).is_ok()) && magic == elf::ELFMAG
}

fn inspect_elf(file: File) -> object::read::Result<Reach> {
    let data = ReadCache::new(file);
    match FileKind::parse(&data)? {
        FileKind::Elf64 => {
            let header = FileHeader64::<Endianness>::parse(&data)?;
            match header.e_machine(header.endian()?) {
                OUR_MACHINE if cfg!(target_pointer_width = "64") => inspect_loader(header, &data),
                machine => Ok(other_architecture(machine, 64)),
            }
        }
        FileKind::Elf32 => {
            let header = FileHeader32::<Endianness>::parse(&data)?;
            Ok(other_architecture(header.e_machine(header.endian()?), 32))
        }
        _ => Ok(Reach::Reached),
    }
}

#[cfg(target_arch = "x86_64")]
const OUR_MACHINE: elf::Machine = elf::EM_X86_64;
#[cfg(target_arch = "aarch64")]
const OUR_MACHINE: elf::Machine = elf::EM_AARCH64;

fn other_architecture(machine: elf::Machine, bits: u32) -> Reach {
    let name = match machine {
        elf::EM_X86_64 => "x86-64",
        elf::EM_386 => "x86",
        elf::EM_AARCH64 => "AArch64",
        elf::EM_ARM => "ARM",
        elf::EM_RISCV => "RISC-V",
        elf::EM_PPC64 => "POWER",
        elf::EM_S390 => "IBM Z",
        _ => "another architecture",
    };
    Reach::Unreached(format!(
        "it is a {bits}-bit program for {name}, while ringlet was built for {}",
        std::env::consts::ARCH
    ))
}

/// A program names its dynamic loader, whose name tells the C library; one without a loader is static.
fn inspect_loader<H: FileHeader<Endian = Endianness>>(
    header: &H,
    data: &ReadCache<File>,
) -> object::read::Result<Reach> {
    let endian = header.endian()?;
    for segment in header.program_headers(endian, data)? {
        if segment.p_type(endian) != elf::PT_INTERP {
            continue;
        }
        // KERNEL: it takes no longer name.
        if segment.p_filesz(endian).into() > libc::PATH_MAX as u64 {
            break;
        }
        let Ok(loader) = segment.data(endian, data) else { break };
        let loader = Path::new(OsStr::from_bytes(loader.strip_suffix(b"\0").unwrap_or(loader)));
        let name = loader.file_name().unwrap_or_default().as_bytes();
        return Ok(if name.starts_with(b"ld-linux") || name.starts_with(b"ld-musl") {
            Reach::Reached
        } else {
            let loader = printable(&loader.to_string_lossy());
            Reach::Unreached(format!("its loader {loader} is neither glibc's nor musl's"))
        });
    }
    Ok(Reach::ChildrenOnly("it is statically linked".into()))
}

/// In a program that gains privileges when it starts, the loader ignores LD_PRELOAD.
fn inspect_privileges(path: &Path, metadata: &Metadata) -> Reach {
    let (setuid, setgid) = (metadata.mode() & 0o4000 != 0, metadata.mode() & 0o2010 == 0o2010);
    let (user, group) = (rustix::process::getuid(), rustix::process::getgid());
    let inert = rustix::thread::no_new_privs().unwrap_or(false)
        || rustix::fs::statvfs(path)
            .is_ok_and(|status| status.f_flag.contains(StatVfsMountFlags::NOSUID));
    let gains = if inert {
        return Reach::Reached;
    } else if setuid && metadata.uid() != user.as_raw() {
        "it is set-user-ID"
    } else if setgid && metadata.gid() != group.as_raw() {
        "it is set-group-ID"
    } else if !user.is_root() && has_capabilities(path) {
        "it has file capabilities"
    } else {
        return Reach::Reached;
    };
    Reach::Unreached(format!("{gains}, and the loader preloads nothing into such programs"))
}

fn has_capabilities(path: &Path) -> bool {
    // Version 2 holds 20 bytes and version 3, with the user namespace's root, 24.
    let mut value = [0; 24];
    rustix::fs::getxattr(path, "security.capability", &mut value).is_ok_and(|length| length > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn env_lines_name_their_program() {
        let words = |line: &'static str| line.split(' ').map(OsStr::new).collect::<Vec<_>>();
        let program = |line| {
            program_of_env(&words(line)).map(|(program, rest)| (program.to_owned(), rest.len()))
        };
        assert_eq!(program("python3"), Some(("python3".into(), 0)));
        assert_eq!(program("-S A=1 python3 -u x"), Some(("python3".into(), 2)));
        assert_eq!(program("-i"), None);
    }

    #[test]
    fn path_is_searched_as_execvp_does() {
        let path = OsStr::new("/nowhere:/usr/bin:/bin");
        assert!(find(OsStr::new("sh"), Some(path)).is_ok());
        assert_eq!(find(OsStr::new("no-such-program"), Some(path)), Err(NotFound::Missing));
        assert_eq!(find(OsStr::new("/etc"), Some(path)), Err(NotFound::NotExecutable));
        assert_eq!(find(OsStr::new(""), Some(path)), Err(NotFound::Missing));
        assert_eq!(find(OsStr::new("/etc/passwd/x"), Some(path)), Err(NotFound::Missing));
    }
}
